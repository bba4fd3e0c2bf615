"""Tests of kernels: what they compile to, and in a process of their own what they compute."""
