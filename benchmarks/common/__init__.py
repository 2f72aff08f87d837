"""What every measurement needs: the machine in words, and the environment of its process."""
