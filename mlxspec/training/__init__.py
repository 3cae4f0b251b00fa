"""Trains a draft head for a model on this machine. Everything that it learns from stays here."""
