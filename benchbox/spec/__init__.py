"""matrix.yaml -> Matrix: typed, frozen, every error with file:line:column and a suggestion."""
