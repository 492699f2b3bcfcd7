"""Open, check, resize and corrupt images and videos. No other package opens them."""
