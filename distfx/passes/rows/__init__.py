"""The rows of the rule table, by kind of operator."""
