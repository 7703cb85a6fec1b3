"""The scenario of `make demo-lending`: trainings on machines whose owners take them back and lend them again."""
