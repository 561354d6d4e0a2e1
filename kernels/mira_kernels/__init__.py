"""Expert arithmetic: reference, CPU kernels, dispatch by capability."""
