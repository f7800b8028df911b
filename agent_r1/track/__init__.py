"""Trackers: metrics, evaluations, transcripts and the curve of a run, sent elsewhere while it trains."""
