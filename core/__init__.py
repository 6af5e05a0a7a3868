"""The ground: what every other room stands on. Imports none of them."""
