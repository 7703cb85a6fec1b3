{{- define "mizzen.labels" -}}
app.kubernetes.io/name: mizzen
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* The labels by which a Deployment finds its pods: a dict of root and part. */}}
{{- define "mizzen.selector" -}}
app.kubernetes.io/name: mizzen
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* A container: a dict of root, name, args (a list), resources and probes (YAML). */}}
{{- define "mizzen.container" -}}
- name: {{ .name }}
  image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: {{ toJson .args }}
  envFrom:
    - secretRef: {name: {{ .root.Values.connectionSecret }}}
    {{- with .root.Values.envFrom }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  resources: {{ toYaml .resources | nindent 4 }}
  {{- with .probes }}
  {{- . | nindent 2 }}
  {{- end }}
  volumeMounts:
    - {name: data, mountPath: /data}
    - {name: tmp, mountPath: /tmp}
    - {name: keys, mountPath: /data/operator.key, subPath: operator.key, readOnly: true}
    - {name: keys, mountPath: /etc/mizzen/keys, readOnly: true}
    - {name: settings, mountPath: /etc/mizzen/mizzen.yaml, subPath: mizzen.yaml, readOnly: true}
{{- end }}

{{/* What all pods share. Nothing in them uses the API of Kubernetes, so they get no token and no rights. */}}
{{- define "mizzen.pod" -}}
serviceAccountName: {{ .Release.Name }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
volumes:
  - {name: data, emptyDir: {}}
  - {name: tmp, emptyDir: {}}
  - name: keys
    secret: {secretName: {{ .Values.keysSecret }}, defaultMode: 0440}
  - name: settings
    configMap: {name: {{ .Release.Name }}-settings}
{{- end }}
