"""Tools that responses may call, and the processes that run them."""
