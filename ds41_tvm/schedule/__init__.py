"""Schedules: how a kernel becomes a program for one kind of target."""
