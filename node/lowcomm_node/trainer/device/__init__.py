"""What exchanges compute, for vectors on a GPU: the same bits as the loops for host memory.

``kernels.py`` chooses. The other files are Triton kernels, and nothing imports them, or Triton,
where a vector is in host memory.
"""
