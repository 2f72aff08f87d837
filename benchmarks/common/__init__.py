"""Code that every measurement needs: a description of the machine, and the environment of its
process."""
