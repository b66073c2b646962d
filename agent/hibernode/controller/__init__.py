"""The controller of DynamoCheckpoint objects: a Job for each, and its end told in the object's status."""
