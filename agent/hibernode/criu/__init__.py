"""CRIU: what it is asked, how it is run, what its log means, what its images say."""
