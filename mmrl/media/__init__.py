"""The only room that opens pictures."""
