"""The rule table: how the iteration space of each operator maps to its operands."""
