"""Names of a matrix: policies, backends, recipes, metrics. Imports no torch; a named object is loaded when it is used."""
