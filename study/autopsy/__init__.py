"""The published listing taken apart: which of its switches makes which part of what it reports."""
