"""From a recipe to a page: rows, the contract of a recipe, its execution, and the merging of what each row did."""
