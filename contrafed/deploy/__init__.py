"""Certificates and keys of a deployment."""
