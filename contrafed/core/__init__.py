"""Basic parts that every other room uses. This room imports none of them."""
