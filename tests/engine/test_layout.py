"""A layout's buckets, filled and released at once or member by member."""

from __future__ import annotations

import pytest

from hvd_deepreduce.engine import BucketLayout, Member, Parameter


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_at_once_as_member_by_member(order):
    members = [Member(Parameter(str(i), i, (600,), "float32"), 600) for i in range(6)]
    one, other = BucketLayout(members, 4800), BucketLayout(members, 4800)
    assert len(one.buckets) == 3
    for _ in range(2):
        for at in order:
            by_member = [one.mark_ready(one.buckets[at], parameter) for parameter in one.buckets[at].members]
            at_once = other.mark_full(other.buckets[at])
            assert by_member[0] == []
            assert [bucket.number for bucket in by_member[1]] == [bucket.number for bucket in at_once]
            assert one.in_flight == other.in_flight and not other.buckets[at].empty
        for at in order:
            for parameter in one.buckets[at].members:
                one.release(one.buckets[at], parameter)
            other.release_all(other.buckets[at])
            assert one.in_flight == other.in_flight and other.buckets[at].empty
        for bucket in other.buckets:
            assert other.started == 0 and bucket.part_of(bucket.members[1].name) == (600, 1200)
