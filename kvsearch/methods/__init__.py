"""Calibration methods, a class each: what it measures, plans of its profiles, what is said of them."""
