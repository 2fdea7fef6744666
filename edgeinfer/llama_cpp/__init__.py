"""llama.cpp as an engine, through llama-cpp-python."""
