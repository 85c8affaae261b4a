"""Operators of this package in other libraries: one module a library, named like it. Nothing is imported here."""
