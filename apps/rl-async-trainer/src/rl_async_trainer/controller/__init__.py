"""The controller: carries out the scheduler's decisions by calling the roles."""
