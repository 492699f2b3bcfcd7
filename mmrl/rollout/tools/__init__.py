"""Tools a model may call within a response, and the processes that run them."""
