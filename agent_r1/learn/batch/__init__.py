"""Segments, packs, token trees and mini-batches."""
