"""What must hold for compiled loops: no two of different codecs can be taken for each other."""

from lowcomm_protocol.codecs import e3m0, int8, q1, q2


def test_loops_that_one_function_makes_for_several_codecs_have_names_of_their_own() -> None:
    # numba adds a number to the name, but that begins anew in every process, and caches outlive it.
    loops = [
        (one.py_func.__module__, one.py_func.__qualname__)
        for codec in (e3m0, int8, q1, q2)
        for one in (codec._encode, codec._send, codec._check, codec._decode)
    ]
    assert len(set(loops)) == 16
