"""What every other room stands on. It imports none of them."""
