"""Services that rewards call: renderers, encoders, judges, reward models.

A service is an option of the rewards that use it, checked like any other option. When it does not answer within its
limits, the reward raises `Unscorable`: a service that fails says nothing about the response.
"""
