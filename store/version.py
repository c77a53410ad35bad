"""The version of this agentctl. A test keeps it equal to the one of the package."""

VERSION = "0.1.0"
