"""What rewards ask that is no pure function: renderers, encoders, judges, reward models.

Each is an option of the rewards that use it, checked like any other. It answers within limits or the reward is
`Unscorable`: a service that fails says nothing about the response.
"""
