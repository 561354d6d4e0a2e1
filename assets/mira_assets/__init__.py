"""Files that ship with the program: recipe, catalog, prompts, themes."""
