"""Rules that find the answer in a response."""
