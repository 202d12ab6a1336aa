"""Replay of a plan on teacher-forced answers, from one dense prefill."""
