"""How the ranks' containers become one sum.

``settings`` has the settings of each exchange and the registry, ``traffic`` what an operation puts on the wire, and
``costs`` the cost model. ``reduce_scatter`` and ``two_levels`` are programs of one rank over the collectives of a job;
``balance``, ``short_slices`` and ``failures`` are their parts. ``mpi`` has the sparse allreduces over mpi4py.
"""
