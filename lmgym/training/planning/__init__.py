"""Before a run: do lengths, memory and time fit?"""
