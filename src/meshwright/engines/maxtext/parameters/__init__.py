"""MaxText's parameters: the arrays, and the matrices that each is made of."""
