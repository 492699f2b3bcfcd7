"""The nouns: frozen data that crosses rooms. Standard library only.

A run is a chain of these, each made from the one before:

    Sample ──ask──► Prompt ──answer──► Rollout ──judge──► Group ──choose──► Experience ──learn──► weights

Example, one counting question on its way through the loop:

    Sample(id="count-7", task="count", parts=(ImageRef(path="7.png", sha256="ab.."), "How many red dots?"),
           target=Target(kind=Kind.NUMBER, value=3))
    Prompt(sample=..., ids=(5, 9, 9, ..), grids=((1, 6, 6),), resizes=(ResizeMap((48, 48), (48, 48)),), ..)
    Rollout(prompt=..., index=0, segments=(Segment(ids=(41, 3), logps=(-0.2, -1.1), author=Author.POLICY),), ..)
    Score(terms={"count": Term(0.0, "2, expected 3")}, total=0.0)
    Group(prompt=..., rollouts=(.., ..), scores=(.., ..))
    Experience(rollout=..., advantage=-0.7)
"""

from mmrl.types.errors import Interrupted, TooLongError, Unscorable, UserError
from mmrl.types.experience import Choice, Experience
from mmrl.types.media import Access, Frame, ImageRef, MediaRef, Part, Place, ResizeMap, Size, Veil, VideoRef
from mmrl.types.reward import Failure, Fault, Group, HeldOut, Score, Skip, Term
from mmrl.types.rollout import Answer, Answers, Author, Finish, Prompt, Response, Rollout, SamplingLaw, Segment, View
from mmrl.types.sample import Action, Kind, Region, Reject, Sample, Target
from mmrl.types.state import State, Visit

__all__ = [
    "Access",
    "Action",
    "Answer",
    "Answers",
    "Author",
    "Choice",
    "Experience",
    "Failure",
    "Fault",
    "Finish",
    "Frame",
    "Group",
    "HeldOut",
    "ImageRef",
    "Interrupted",
    "Kind",
    "MediaRef",
    "Part",
    "Place",
    "Prompt",
    "Region",
    "Reject",
    "ResizeMap",
    "Response",
    "Rollout",
    "Sample",
    "SamplingLaw",
    "Score",
    "Segment",
    "Size",
    "Skip",
    "State",
    "Target",
    "Term",
    "TooLongError",
    "Unscorable",
    "UserError",
    "Veil",
    "VideoRef",
    "View",
    "Visit",
]
