"""The small heads of a DSpark drafter: Markov (sequential) and confidence."""
