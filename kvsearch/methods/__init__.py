"""Calibration methods, a class each: what it measures, how its profiles become plans, and how they are described."""
