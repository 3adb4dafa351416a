//! The Linux capabilities that a container may have.

/// Capabilities a container may have, with their Linux numbers. They act inside the pod's user namespace only.
pub const ALLOWED_CAPABILITIES: [(&str, u32); 14] = [
    ("CHOWN", 0),
    ("DAC_OVERRIDE", 1),
    ("DAC_READ_SEARCH", 2),
    ("FOWNER", 3),
    ("FSETID", 4),
    ("KILL", 5),
    ("SETGID", 6),
    ("SETUID", 7),
    ("SETPCAP", 8),
    ("NET_BIND_SERVICE", 10),
    ("SYS_CHROOT", 18),
    ("SYS_NICE", 23),
    ("AUDIT_WRITE", 29),
    ("SETFCAP", 31),
];
