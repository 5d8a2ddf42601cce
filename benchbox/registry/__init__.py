"""What can be named: policies, backends, recipes. Imports no torch; the named object is loaded only when it is used."""
