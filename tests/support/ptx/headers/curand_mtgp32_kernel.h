/* Nothing: Clang includes it with the others, and it is a large package of its own. */
