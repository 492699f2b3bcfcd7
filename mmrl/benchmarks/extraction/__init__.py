"""Rules that find the answer in a response, and compare it with the correct one."""
