"""A training step whose gradients come and go through operations of a graph, without a framework.

An adapter adds the operations to its framework's graphs, and gives each unit of gradients a ``Runtime``.
"""
