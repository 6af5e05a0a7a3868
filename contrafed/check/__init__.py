"""Tests of an author's method, network and data: ``contrafed check``, and its cheap part before a run."""
