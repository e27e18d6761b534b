"""Which factors of each operator are on which axes: legal strategies, their cost, and the search among them."""
