"""Mutants of the native code, drawn at random: how many of them do the simulation and the tests find?"""
