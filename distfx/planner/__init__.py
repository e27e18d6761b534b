"""Which factors of each operator lie on which axes: legal strategies, their cost, and the search among them."""
