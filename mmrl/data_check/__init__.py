"""Check the data of a run before it starts, and show samples as the model will see them."""
