"""The rules that benchmarks publish, each as its authors' code has it, quirks included."""
