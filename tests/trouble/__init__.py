"""Problems that users report of similar software, each tested once by the command line."""
